"""Imported first by the server of ranks alone: what it imports stays, so that nothing is looked for
among it, a quarter of the time of the imports. A rank takes garbage collection up again."""

import gc

gc.disable()
