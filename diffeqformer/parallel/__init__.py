"""Many devices and many hosts: the mesh, and what hosts agree on."""
