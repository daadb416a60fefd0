"""Usage reports: rows and sums of the ledger, filtered, exported and plotted."""
