"""The contract between tracing and composing: rank programs, groups, roles, memory events, the run directory."""
