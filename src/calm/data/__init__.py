"""Data pipeline: text → documents → tokens → shards → batches. Nothing in this package imports torch."""
