"""Work over many processes and machines, through Ray; needs the extra `ray`."""
