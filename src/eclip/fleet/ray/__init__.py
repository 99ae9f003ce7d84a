"""Ray: the cluster, the controller, and the actors that it keeps running."""
