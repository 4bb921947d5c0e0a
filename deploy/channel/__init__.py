"""How runs travel from engine replicas to fronts: one connection for each pair of processes.

An engine replica connects to a front on its first request (`sender`), and sends all runs of a step
for that front as one frame (`messages`); the front gives each request its own (`receiver`). What
asks for something, a request among it, goes through Serve's handle as ever. See ADR 0019.
"""
