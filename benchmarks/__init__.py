"""How fast Equipoise is next to other simulators, on the same work."""
