"""Vector fields: what one block does to a state, given the block's weights at that time."""
