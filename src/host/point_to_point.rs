//! Sends and receives with tags.
