"""What host and board say over the serial line: frames, messages, sessions, exactly once."""
