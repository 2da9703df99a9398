//! The faults of a world.

use std::time::Duration;

use rand::RngExt;
use replay_link::stack::Stack;
use simulation::{SimLink, SimStack};

use super::{Story, USER_TIMEOUT};
use crate::disk::DiskFaults;
use crate::machine::Machine;

/// Longest pause of a program.
const PAUSE: Duration = Duration::from_secs(25);

impl Story {
    /// One fault.
    pub(super) async fn fault(&mut self) {
        match self.random.random_range(0..15) {
            0 | 1 => {
                let links = self.stack.links();
                if !links.is_empty() {
                    let link = &links[self.random.random_range(0..links.len())];
                    match self.random.random_bool(0.5) {
                        true => link.cut(),
                        false => link.cut_after_sent(self.random.random_range(0..500)),
                    }
                }
            }
            2 => self.partition(),
            3 => {
                let longest = [2, 50, 1_000][self.random.random_range(0..3)];
                self.stack.set_delay(Duration::ZERO..=Duration::from_millis(longest));
            }
            4 => self.stack.set_buffer([256, 4 << 10, 64 << 10][self.random.random_range(0..3)]),
            5 => self.restart(Machine::kill).await,
            6 => {
                for link in self.stack.links() {
                    // Peers of a machine without power get no end of their connections.
                    if self.users.machines.len() == 1 {
                        self.silence(link);
                    }
                }
                self.restart(Machine::lose_power).await;
            }
            7 => {
                let machine = self.machine();
                machine.disk().set_faults(DiskFaults {
                    failing: [0.0, 0.05, 0.5][self.random.random_range(0..3)],
                    capacity: [0, 0, 1 << 16][self.random.random_range(0..3)],
                    power_fails_after: self.random.random_bool(0.5).then(|| self.random.random_range(0..40)),
                });
            }
            8 => {
                let index = self.random.random_range(0..self.programs.len());
                let (program, role) = self.programs.swap_remove(index);
                self.stack.kill(&program);
                self.start(role);
            }
            9 => {
                let index = self.random.random_range(0..self.programs.len());
                let program = self.programs[index].0.clone();
                self.pause(program);
            }
            10 => {
                if let Some(program) = self.machine().program() {
                    self.pause(program);
                }
            }
            11 => {
                let seconds = [1, 30, 600][self.random.random_range(0..3)];
                self.stack.jump(Duration::from_secs(seconds));
            }
            12 => {
                let longest = Duration::from_millis(self.random.random_range(1..1_000));
                if let Some(program) = self.machine().program() {
                    program.set_own_delay(Duration::ZERO..=longest);
                }
            }
            13 => self.stack.set_returns_zero(true),
            _ => self.restart(Machine::shut_down).await,
        }
        self.power_failures().await;
    }

    /// Stops a program for a while.
    fn pause(&mut self, program: SimStack) {
        let time = self.random.random_range(Duration::ZERO..PAUSE);
        self.stack.pause(&program);
        let stack = self.stack.clone();
        self.stack.spawn(async move {
            stack.sleep(time).await;
            stack.resume(&program);
        });
    }

    fn machine(&mut self) -> Machine {
        let machines = &self.users.machines;
        machines[self.random.random_range(0..machines.len())].clone()
    }

    /// Nothing passes for a while on some links.
    fn partition(&mut self) {
        let share = self.random.random_range(0.1..1.0);
        for link in self.stack.links() {
            if !self.random.random_bool(share) {
                continue;
            }
            if self.random.random_bool(0.3) {
                self.silence(link);
                continue;
            }
            link.hold();
            let (stack, time) = (self.stack.clone(), self.random.random_range(0..20_000));
            self.stack.spawn(async move {
                stack.sleep(Duration::from_millis(time)).await;
                link.release();
            });
        }
    }

    /// A link that is dead without a word, until the kernel gives it up.
    fn silence(&self, link: SimLink) {
        link.hold();
        let stack = self.stack.clone();
        self.stack.spawn(async move {
            stack.sleep(USER_TIMEOUT).await;
            link.cut();
        });
    }

    /// Ends a server and starts it again.
    async fn restart(&mut self, end: fn(&Machine)) {
        let machine = self.machine();
        end(&machine);
        // Longer than any segment is on its way.
        let pause = Duration::from_millis(self.random.random_range(2_000..20_000));
        self.stack.sleep(pause).await;
        machine.kill();
        if !machine.disk().is_dead() && self.random.random_bool(0.2) {
            machine.damage_snapshot();
        }
        self.start_again(&machine).await;
    }

    async fn start_again(&mut self, machine: &Machine) {
        while !machine.start(self.save_every) {
            self.stack.sleep(Duration::from_secs(1)).await;
            machine.disk().set_faults(DiskFaults::default());
            if machine.disk().is_dead() {
                machine.disk().restart();
            }
        }
    }

    /// Machines whose power has failed in the middle of a save start again.
    pub(super) async fn power_failures(&mut self) {
        for machine in self.users.machines.clone() {
            if machine.disk().is_dead() {
                machine.lose_power();
                self.stack.sleep(Duration::from_secs(3)).await;
                self.start_again(&machine).await;
            }
        }
    }
}
