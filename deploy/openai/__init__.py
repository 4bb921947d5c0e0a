"""The OpenAI HTTP surface: protocol, errors, streaming, routes."""
