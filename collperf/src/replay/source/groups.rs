//! The communicators of a record, numbered.

use std::collections::HashMap;

use crate::replay::recording::Group;

/// The communicators found so far.
pub(super) struct Groups {
    world_size: usize,
    list: Vec<Group>,
    /// The numbers of those with the same id and members.
    numbers: HashMap<(String, Vec<usize>), usize>,
}

impl Groups {
    pub(super) fn new(world_size: usize) -> Self {
        Self { world_size, list: Vec::new(), numbers: HashMap::new() }
    }

    /// Returns the number under which the device calls of such a communicator are replayed. They have an order of their
    /// own, so they need a communicator of their own.
    pub(super) fn number_of_device(&mut self, id: &str, name: &str, members: Vec<usize>) -> Result<usize, String> {
        self.number(&format!("{id} on devices"), &format!("{name} (device calls)"), members)
    }

    /// Returns the number of the communicator with this id and these members. `name` is for people.
    pub(super) fn number(&mut self, id: &str, name: &str, members: Vec<usize>) -> Result<usize, String> {
        let key = (id.to_owned(), members);
        if let Some(number) = self.numbers.get(&key) {
            return Ok(*number);
        }
        let members = key.1.clone();
        let mut is_member = vec![false; self.world_size];
        for rank in &members {
            match is_member.get_mut(*rank) {
                None => return Err(format!("communicator {name} has rank {rank}, but the job has only {} ranks", self.world_size)),
                Some(true) => return Err(format!("communicator {name} lists rank {rank} twice")),
                Some(seen) => *seen = true,
            }
        }
        if members.is_empty() {
            return Err(format!("communicator {name} has no ranks"));
        }
        let number = self.list.len();
        self.numbers.insert(key, number);
        self.list.push(Group { name: name.to_owned(), members });
        Ok(number)
    }

    pub(super) fn into_list(self) -> Vec<Group> {
        self.list
    }
}
