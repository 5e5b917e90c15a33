//! A cart with a pole on a track, to be balanced by pushing left or right: the classic control problem
//! of Barto, Sutton and Anderson (1983), with the constants and limits that "CartPole-v1" stands for.

use rand::Rng;

/// Position, velocity, angle of the pole from upright, angular velocity; metres, radians, seconds.
pub type Observation = [f32; 4];

/// An episode is cut off after so many steps.
pub const STEP_LIMIT: u32 = 500;
/// Pushes: to the left and to the right.
pub const ACTIONS: usize = 2;

const GRAVITY: f64 = 9.8;
const CART_MASS: f64 = 1.0;
const POLE_MASS: f64 = 0.1;
const TOTAL_MASS: f64 = CART_MASS + POLE_MASS;
/// Half of the pole: from the joint to its centre of mass.
const POLE_LENGTH: f64 = 0.5;
const FORCE: f64 = 10.0;
const TIME_STEP: f64 = 0.02;
const POSITION_LIMIT: f64 = 2.4;
const ANGLE_LIMIT: f64 = 12.0 * std::f64::consts::PI / 180.0;
/// Every number of the first state is within this of zero.
const START: f64 = 0.05;

/// One episode in progress.
#[derive(Clone, Debug, PartialEq)]
pub struct CartPole {
    position: f64,
    velocity: f64,
    angle: f64,
    spin: f64,
    steps: u32,
}

/// The result of a push. Each is worth a reward of 1, also the last.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    pub observation: Observation,
    /// The pole fell, the cart left the track, or the limit of steps is reached.
    pub done: bool,
}

impl CartPole {
    /// Begins an episode nearly upright.
    pub fn start(random: &mut impl Rng) -> Self {
        let mut draw = || random.random_range(-START..START);
        Self { position: draw(), velocity: draw(), angle: draw(), spin: draw(), steps: 0 }
    }

    #[must_use]
    pub fn observation(&self) -> Observation {
        [self.position as f32, self.velocity as f32, self.angle as f32, self.spin as f32]
    }

    /// Pushes for one time step: to the right if `action` is 1, else to the left. Explicit Euler: positions
    /// move with the velocities of before the push.
    pub fn push(&mut self, action: usize) -> Outcome {
        let force = if action == 1 { FORCE } else { -FORCE };
        let (sin, cos) = self.angle.sin_cos();
        let pulled = (force + POLE_MASS * POLE_LENGTH * self.spin * self.spin * sin) / TOTAL_MASS;
        let spin_change =
            (GRAVITY * sin - cos * pulled) / (POLE_LENGTH * (4.0 / 3.0 - POLE_MASS * cos * cos / TOTAL_MASS));
        let acceleration = pulled - POLE_MASS * POLE_LENGTH * spin_change * cos / TOTAL_MASS;
        self.position += TIME_STEP * self.velocity;
        self.velocity += TIME_STEP * acceleration;
        self.angle += TIME_STEP * self.spin;
        self.spin += TIME_STEP * spin_change;
        self.steps += 1;
        Outcome { observation: self.observation(), done: self.is_over() }
    }

    fn is_over(&self) -> bool {
        self.position.abs() > POSITION_LIMIT || self.angle.abs() > ANGLE_LIMIT || self.steps >= STEP_LIMIT
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    use super::*;

    #[test]
    fn one_push_from_rest_moves_as_the_equations_say() {
        let mut cart = CartPole { position: 0.0, velocity: 0.0, angle: 0.0, spin: 0.0, steps: 0 };
        // By hand: 10 N on 1.1 kg; the pole's angular acceleration is -(10 / 1.1) / (0.5 (4/3 - 0.1 / 1.1)).
        let spin = -0.02 * (10.0 / 1.1) / (0.5 * (4.0 / 3.0 - 0.1 / 1.1));
        let velocity = 0.02 * (10.0 / 1.1) - 0.1 * 0.5 * spin / 1.1;
        let Outcome { observation, done } = cart.push(1);
        assert!(!done);
        for (found, want) in observation.into_iter().zip([0.0, velocity, 0.0, spin]) {
            assert!((f64::from(found) - want).abs() < 1e-6, "{found} should be {want}");
        }
        let mut mirrored = CartPole { position: 0.0, velocity: 0.0, angle: 0.0, spin: 0.0, steps: 0 };
        assert_eq!(mirrored.push(0).observation.map(|x| -x), observation);
    }

    #[test]
    fn pushing_one_way_soon_ends_the_episode() {
        let mut random = ChaCha8Rng::seed_from_u64(1);
        for _ in 0..100 {
            let mut cart = CartPole::start(&mut random);
            assert!(cart.observation().iter().all(|x| x.abs() <= 0.05));
            let steps = (1..).find(|_| cart.push(0).done).expect("it falls");
            assert!((8..=11).contains(&steps), "{steps} steps");
        }
    }

    #[test]
    fn pushing_towards_the_fall_balances_until_the_limit() {
        let mut cart = CartPole::start(&mut ChaCha8Rng::seed_from_u64(2));
        let mut steps = 0;
        loop {
            let [position, velocity, angle, spin] = cart.observation();
            steps += 1;
            if cart.push(usize::from(angle + spin + 0.1 * position + 0.2 * velocity > 0.0)).done {
                break;
            }
        }
        assert_eq!(steps, STEP_LIMIT);
    }

    #[test]
    fn each_limit_ends_the_episode() {
        let upright = CartPole { position: 0.0, velocity: 0.0, angle: 0.0, spin: 0.0, steps: 0 };
        let rows = [
            ("off the track", CartPole { position: 2.39, velocity: 1.0, ..upright.clone() }, true),
            ("fallen", CartPole { angle: -0.2, spin: -0.6, ..upright.clone() }, true),
            ("the last step", CartPole { steps: STEP_LIMIT - 1, ..upright.clone() }, true),
            ("the last but one", CartPole { steps: STEP_LIMIT - 2, ..upright }, false),
        ];
        for (label, mut cart, want) in rows {
            assert_eq!(cart.push(1).done, want, "{label}");
        }
    }
}
