import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.Map;
import org.apache.rocketmq.filter.FilterFactory;
import org.apache.rocketmq.filter.expression.EvaluationContext;
import org.apache.rocketmq.filter.expression.Expression;

/**
 * What RocketMQ's SQL92 filter says. A line of input is the expression, then name and value of each property, all of
 * it UTF-8 in hex, with tabs between. A line of output is "refused", "error", "null", "true" or "false".
 */
public class FilterCheck {
    public static void main(String[] arguments) throws Exception {
        PrintStream out = new PrintStream(System.out, false, "UTF-8");
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            String[] parts = line.split("\t", -1);
            Map<String, String> properties = new HashMap<>();
            for (int at = 1; at + 1 < parts.length; at += 2) {
                properties.put(text(parts[at]), text(parts[at + 1]));
            }
            out.println(verdict(text(parts[0]), properties));
        }
        out.flush();
    }

    private static String verdict(String expression, Map<String, String> properties) {
        Expression compiled;
        try {
            compiled = FilterFactory.INSTANCE.get("SQL92").compile(expression);
        } catch (Throwable refused) {
            return "refused";
        }
        try {
            return String.valueOf(compiled.evaluate(new EvaluationContext() {
                public Object get(String name) {
                    return properties.get(name);
                }

                public Map<String, Object> keyValues() {
                    return new HashMap<String, Object>(properties);
                }
            }));
        } catch (Throwable error) {
            return "error";
        }
    }

    private static String text(String hex) {
        byte[] bytes = new byte[hex.length() / 2];
        for (int at = 0; at < bytes.length; at++) {
            bytes[at] = (byte) Integer.parseInt(hex.substring(2 * at, 2 * at + 2), 16);
        }
        return new String(bytes, StandardCharsets.UTF_8);
    }
}
