"""Which ranks there are and whether they live: rendezvous, the store, the overseer of rank 0 and every rank's watchdog."""
