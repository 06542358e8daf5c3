"""`gramian certify`: a config's layout against one plain process, and a run against itself."""
