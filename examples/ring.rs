//! A token travels round the ring: each rank adds its number and sends it on. Then all ranks pass a block to the right
//! at once.
//!
//! `cargo launch --nproc-per-node 4 -- target/debug/examples/ring`

use collectives::Communicator;

fn main() -> collectives::Result<()> {
    let comm = Communicator::from_env()?;
    let (rank, size) = (comm.rank(), comm.world_size());
    let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);

    // One after another: rank 0 starts, and gets the token back.
    let mut token = 0_u64;
    if rank == 0 {
        let sent = comm.start_send(token, next)?;
        comm.recv(&mut token, previous)?;
        sent.wait()?;
        println!("the token came back with {token}, expected {}", size * (size - 1) / 2);
        assert_eq!(token as usize, size * (size - 1) / 2);
    } else {
        comm.recv(&mut token, previous)?;
        comm.send(&(token + rank as u64), next)?;
    }

    // All at once: in a group, no rank waits for another before it sends.
    let mine = vec![rank as u32; 1 << 16];
    let mut theirs = vec![0_u32; 1 << 16];
    comm.group(|group| {
        group.send(&mine, next)?;
        group.recv(&mut theirs, previous)
    })?;
    assert!(theirs.iter().all(|value| *value as usize == previous));
    println!("rank {rank}: got {} elements from rank {previous}", theirs.len());
    comm.close()
}
