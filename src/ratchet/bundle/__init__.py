"""What makes an exported model a thing that can be trusted: keys, signature, bill of materials, origin."""
