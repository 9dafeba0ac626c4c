"""From a composed step to numbers for people and machines."""
