//! Filling and comparing memory on the device.

use collectives::Error;

use super::gpu::ranks;
use crate::common::cases::Memory;

#[test]
fn what_was_filled_is_what_is_counted() {
    ranks(1, |comm, memory| {
        let device = comm.device().unwrap();
        let pattern: Vec<u16> = (0..24).map(|index| index * 1000 + 1).collect();
        let on_device = memory.put(&pattern);
        for (count, phase) in [(0, 0), (1, 5), (24, 0), (1001, 7), (70_003, 23), (5000, 24 * 9 + 2)] {
            let mut buffer = memory.put(&vec![0_u16; count]);
            device.fill(&mut buffer, &on_device, phase).unwrap();
            let expected: Vec<u16> = (0..count).map(|index| pattern[(index + phase) % pattern.len()]).collect();
            assert_eq!(memory.get(&buffer), expected, "{count} elements from {phase} on");
            assert_eq!(device.count_differing(&buffer, &on_device, phase).unwrap(), 0);
            if count > 1 {
                let mut broken = expected.clone();
                (broken[0], broken[count / 2], broken[count - 1]) = (!expected[0], !expected[count / 2], !expected[count - 1]);
                let differing = broken.iter().zip(&expected).filter(|(a, b)| a != b).count() as u64;
                assert_eq!(device.count_differing(&memory.put(&broken), &on_device, phase).unwrap(), differing);
            }
        }
    });
}

#[test]
fn patterns_that_cannot_be_are_refused() {
    ranks(1, |comm, memory| {
        let device = comm.device().unwrap();
        let mut buffer = memory.put(&[0_u32; 8]);
        let refused = [
            device.fill(&mut buffer, &memory.put(&[1_u32; 3]), 0),
            device.fill(&mut buffer, &memory.put::<u32>(&[]), 0),
            device.fill(&mut buffer, &vec![1_u32; 4], 0),
            device.count_differing(&buffer, &memory.put::<u32>(&[]), 0).map(drop),
            device.count_differing(&vec![1_u32; 4], &buffer, 0).map(drop),
        ];
        for refused in refused {
            assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{refused:?}");
        }
    });
}
