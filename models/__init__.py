"""Plain decoder-only language models: what one device would compute. No process group, no mesh."""
