"""Being a rank, starting ranks on this machine, and how ranks end."""
