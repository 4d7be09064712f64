"""Horovod's API for TensorFlow does not exist here: the import says so."""

raise ImportError(
    "bagua.horovod has Horovod's API for torch alone: import bagua.horovod.torch as hvd. Arrays of other frameworks, "
    "TensorFlow's among them, are communicated by bagua.all_reduce and the other functions of bagua"
)
