"""A comparison as a job: how it is submitted, and what its ranks do."""
