"""The arithmetic that every algorithm shares. What a user may swap, estimators and policy losses, are plugins."""
