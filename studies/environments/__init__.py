"""Problems whose graders have loopholes: the protocol, the micro world, LeetCode, and any problem under a chat model."""
