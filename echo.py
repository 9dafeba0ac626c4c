"""`import echo`: the public face of echo_hooks under its short name."""

from echo_hooks import *  # noqa: F403
from echo_hooks import __all__, __version__  # noqa: F401
