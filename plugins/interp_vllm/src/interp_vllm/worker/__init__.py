"""What runs inside vLLM's worker process. Nothing here is imported by the process that asks."""
