"""Problems of EleutherAI's djinn, whose verifiers have a loophole each."""
