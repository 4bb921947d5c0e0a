"""The outside: Serve application, OpenAI surface, CLI."""
