"""Defines what crosses between the two processes: messages, plans as arrays, the session's rules, and the transport."""
