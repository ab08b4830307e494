"""Files, resumable folders, and manifests."""
