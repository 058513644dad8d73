"""What scripts/chaos is made of."""
