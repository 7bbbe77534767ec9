"""What this machine offers a run and what stands in its way: facts, and findings made of them."""
