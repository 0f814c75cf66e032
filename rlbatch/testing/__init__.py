"""What tests of rlbatch and of its plugins run on."""
