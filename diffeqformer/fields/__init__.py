"""Vector fields by name (`model.field`): what one block does to a state, given the block's weights at that time."""

from diffeqformer.fields.field import Block
from diffeqformer.fields.gpt import GPT
from diffeqformer.fields.llama import Llama
from diffeqformer.fields.neox import NeoX

FIELDS: dict[str, type[Block]] = {"gpt": GPT, "llama": Llama, "neox": NeoX}
