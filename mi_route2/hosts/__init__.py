"""Models to hook, by three libraries and one protocol: plain torch, TransformerLens's bridge, nnsight."""
