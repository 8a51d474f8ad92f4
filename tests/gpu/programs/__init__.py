"""Programs that the tests run in processes of their own, each a plain script.

The first argument of most names the allocator; those under "vramx run" take none, and know nothing
of vramx. Each prints one line of JSON last: what it saw.
"""
