"""Vector fields: the action of one block on a state, given the block's weights at that time."""
