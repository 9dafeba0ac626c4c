"""The virtual world: process groups, store, values; what a process needs to believe it is one rank of many."""

from echo_hooks.world.environment import environment
from echo_hooks.world.payloads import PayloadStore
from echo_hooks.world.values import RealValues, Values
from echo_hooks.world.virtual_world import VirtualWorld

__all__ = ["PayloadStore", "RealValues", "Values", "VirtualWorld", "environment"]
