"""Names only."""

from . import recipe as recipe
