"""Text → documents → tokens → shards → batches. Nothing in here imports torch."""
