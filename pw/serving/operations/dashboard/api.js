// Asks the server. The API key lives in this tab's session storage and nowhere else.

const KEY = "pagedweight-key";
const TIMEOUT_MS = 8000;

export class Unauthorized extends Error {}
export class Unreachable extends Error {}

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

/**
 * The JSON of a route.
 * @throws {Unauthorized} The key is missing or wrong.
 * @throws {Unreachable} No answer, or none that can be used.
 */
export async function get(path) {
  const headers = key.get() ? { authorization: `Bearer ${key.get()}` } : {};
  let answer;
  try {
    answer = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (answer.ok) return await answer.json();
  } catch (error) {
    throw new Unreachable(String(error));
  }
  if (answer.status === 401) throw new Unauthorized();
  throw new Unreachable(`${path}: ${answer.status}`);
}
