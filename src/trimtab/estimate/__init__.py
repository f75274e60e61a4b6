"""What a run will need, from plain numbers: pure functions, no torch, no machine."""
