"""The device process, and the deployments that it runs."""
