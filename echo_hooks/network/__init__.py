"""How long a communication takes on a cluster, and which links it loads."""
