"""Many devices and many hosts: the device mesh, and coordination of the hosts."""
