"""`import echo`: the public face of echo_hooks under its short name."""

import echo_hooks

__all__ = echo_hooks.__all__
__version__ = echo_hooks.__version__


def __getattr__(name: str):
    return getattr(echo_hooks, name)
