//! State that ranks give each other: compared with plain copies, while ranks fail, and with wrong arguments.

mod kills;
mod moves;
mod trouble;
