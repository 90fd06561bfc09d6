"""The speed of Equipoise compared with other simulators, for the same work."""
