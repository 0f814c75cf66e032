"""Why the first place that differs does: what it would hold if its module were computed otherwise."""
