// Runs examples as they are asked for: a line {"name", "url"} comes in, a line {"error"} goes out, null where it held.

import { createInterface } from 'node:readline';
import OpenAI from 'openai';
import * as examples from './examples.mjs';

for await (const line of createInterface({ input: process.stdin })) {
  const { name, url } = JSON.parse(line);
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none', maxRetries: 0 });
  let error = null;
  try {
    await examples[name](client);
  } catch (fault) {
    error = fault.stack ?? String(fault);
  }
  console.log(JSON.stringify({ error }));
}
