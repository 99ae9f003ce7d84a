"""HTTP and gRPC: bytes to requests and responses to bytes."""
