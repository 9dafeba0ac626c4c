"""The command line: torchrun-compatible launching, running a script as each of its ranks, which ranks to trace."""
